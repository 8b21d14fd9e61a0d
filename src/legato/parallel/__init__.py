"""Processes of a run: how they are launched, meet, talk, and hear of each other's end."""
