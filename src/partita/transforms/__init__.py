"""What happens to a client's upload on its way to the server: `partita.transforms`."""
