"""What becomes of requests while they wait."""
