"""What becomes of the KV of a session between two turns."""
