"""Replicas of a model behind one address: `flashcell serve --ray`.

cluster.py starts replica.py several times in Ray Serve; front.py takes the requests, and router.py
chooses a replica for each by the beginnings of its prompt (beginnings.py).
"""
