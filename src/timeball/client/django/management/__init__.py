"""The folder in which Django looks for the commands of an application."""
