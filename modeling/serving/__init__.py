"""The server: `flashcell serve MODEL` answers OpenAI's HTTP API with a recurrent language model.

command.py has the options and starts all. A request passes connections.py (how much a
connection may take), door.py (key and host), app.py (the routes), protocol.py (what may be asked;
fields.py and messages.py are its checks) and sampling.py (requests of the Batcher). engine.py runs
the Batcher in a thread of its own; text.py makes text of its tokens and answers.py OpenAI's objects
of that. ../state/prefix_states.py keeps states by the tokens that they have read, for all requests.
metrics.py counts; page.html is the page at /.

With --ray there are several replicas of all that (replicas/).
"""
