"""The pure part of the Ray engine: names, resources and sentences."""
