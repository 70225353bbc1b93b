"""Tables, curves and files, all made from one Summary."""
