"""The commands of `manage.py`: `timeball_worker`."""
