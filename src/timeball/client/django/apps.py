"""The application for INSTALLED_APPS. It has no models, only the command `timeball_worker`."""

from django.apps import AppConfig


class TimeballConfig(AppConfig):
    """The configuration of the application."""

    name = "timeball.client.django"
    label = "timeball"  # by default it would be "django"
