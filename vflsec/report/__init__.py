"""Tables, curves and files, made from a summary."""
