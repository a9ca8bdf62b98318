"""The features of the policy ``hazard``; nothing here is callable from Python."""
