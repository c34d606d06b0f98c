"""The contract of a method, and what every method needs."""
