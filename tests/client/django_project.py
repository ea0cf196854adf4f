"""Django, set up once in a process, and the tasks of the project: they cannot be imported before."""

import os
import time
from unittest import mock

import django

# Django sets the zone of the whole process, and a Celery that finds the settings in its environment loads them. Other
# tests share the process, and the programs that they start share its environment.
with mock.patch.dict(os.environ, {"DJANGO_SETTINGS_MODULE": "tests.client.django_settings"}):
    django.setup()
time.tzset()

from tests.client import django_shop as shop  # noqa: E402

__all__ = ["shop"]
