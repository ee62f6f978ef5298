"""A browser test of the Temporal UI: `make check-ui`."""
