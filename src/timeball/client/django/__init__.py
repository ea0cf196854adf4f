"""Tasks of Django that Timeball delivers: a backend of Django's Tasks framework, and the command `timeball_worker`.

    TASKS = {
        "default": {
            "BACKEND": "timeball.client.django.backend.TimeballBackend",
            "OPTIONS": {"endpoint": "http://127.0.0.1:7480"},
        },
    }

Add `timeball.client.django` to INSTALLED_APPS for the command. docs/django.md is the manual.

    backend      sends a task as a message, and reads its state from the broker
    worker       runs the tasks of received messages
    tasks_api    the framework: `django.tasks`, or the package django-tasks before Django 6
"""
