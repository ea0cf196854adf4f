"""The dashboard: pages for operators in a browser (docs/dashboard.md).

Receives: answers of the HTTP API, and the input of the user.
Keeps: the account in the sessionStorage of the tab, the colours in localStorage, and nothing in the broker.
Hands on: requests to the HTTP API only.

HTML, CSS and ES modules, which need no build. edges/http serves them below /dashboard/.
"""
