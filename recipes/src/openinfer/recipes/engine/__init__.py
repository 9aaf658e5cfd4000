"""The engine that the recipes share."""
