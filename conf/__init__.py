"""One folder a group, one YAML an option, every field of its class listed. A package only so that wheels carry it."""
