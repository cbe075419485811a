"""What is known of the user's model: whether it fits the data, what else it does, and how to run it."""
