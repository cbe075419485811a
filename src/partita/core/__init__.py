"""Ground: what travels, what each part promises, and the tools that everything stands on."""
