"""The settings of the Django project of these tests. Programs that tests start read the rest from their environment."""

import os

import django

SECRET_KEY = "of the tests"
USE_TZ = True
TIME_ZONE = "UTC"
INSTALLED_APPS = ["timeball.client.django", *(["django_tasks"] if django.VERSION < (6,) else [])]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}


def tasks(endpoint: str, **options: object) -> dict[str, dict[str, object]]:
    """The setting TASKS for a broker."""
    backend = "timeball.client.django.backend.TimeballBackend"
    return {
        "default": {
            "BACKEND": backend, "QUEUES": ["default", "mail"], "OPTIONS": {"endpoint": endpoint, **options},
        }
    }  # fmt: skip


TASKS = tasks(os.environ.get("SHOP_ENDPOINT", "http://127.0.0.1:1"))
