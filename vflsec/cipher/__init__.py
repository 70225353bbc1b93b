"""The cryptography of the encrypted layer: its arithmetic, and the roles of both parties."""
