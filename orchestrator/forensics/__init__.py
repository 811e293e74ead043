"""What a run's memory says afterwards: pure values, nothing is read or started here."""
