"""Every feature of Lightning's Trainer on every mesh: one table, run cell by cell, each equal to one device."""
