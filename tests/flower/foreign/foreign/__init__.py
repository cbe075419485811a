"""An app that nobody at a client has agreed to."""
