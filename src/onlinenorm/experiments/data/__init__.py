"""The data that the experiments read: found, downloaded, checked, and handed out in batches."""
