"""YAML files, one folder a group."""
