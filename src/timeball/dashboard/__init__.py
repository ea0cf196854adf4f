"""The dashboard: what an operator looks at, in a browser (docs/dashboard.md).

Receives: answers of the HTTP API, in the browser; what a person clicks.
Keeps: the account in the tab's sessionStorage, the colours in localStorage; nothing in the broker.
Hands on: requests to the HTTP API, and to nothing else.

Static files that run as they lie here: HTML, CSS and ES modules. edges/http serves them below /dashboard/.
"""
