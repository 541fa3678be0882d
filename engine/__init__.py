"""What the commands stand on."""
