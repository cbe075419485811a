"""What is measured: losses and metrics, scores of every client, who was hurt."""
