"""How the ops are computed: one folder a backend, and what all of them share in ``common``."""
