"""The two roles of an encrypted linear layer, their messages and noise; no torch.

Party C holds the key and the features mu (B, g), party p the labels. Of the weights W (g, C) each holds one share.
"""
