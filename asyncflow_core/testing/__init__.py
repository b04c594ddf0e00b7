"""The conformance kit for plugin authors: one class a service, run by pytest."""
