"""The library code behind the commands."""
