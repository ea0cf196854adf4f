"""Django, set up once in a process, and the tasks of the project: they cannot be imported before."""

import os
import time

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.client.django_settings")
zone = os.environ.get("TZ")
django.setup()
# Django has set the zone of the whole process, which other tests share.
if zone is None:
    os.environ.pop("TZ", None)
else:
    os.environ["TZ"] = zone
time.tzset()

from tests.client import django_shop as shop  # noqa: E402

__all__ = ["shop"]
