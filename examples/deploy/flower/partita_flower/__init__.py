"""A Flower app that carries the requests of Partita to client processes, and their replies back."""
