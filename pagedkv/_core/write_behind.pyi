"""Write-behind to closed tiers; nothing here is callable from Python."""
