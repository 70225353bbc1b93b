"""What every part of vflsec stands on; it imports no plug-in."""
