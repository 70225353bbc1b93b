"""What messages of federated trees say about rows: shared nodes, bounds on columns, sums over nodes."""
