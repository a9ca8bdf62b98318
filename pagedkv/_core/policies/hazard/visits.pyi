"""Requests under way, as the policy ``hazard`` sees them; nothing here is callable from Python."""
