"""Generation: executors, the reader of model streams, the table of faults.

base           the seam: Job in, Deltas out
openai         executor for model servers, on wire (one request), sse, chunks, accumulate (bytes to answer)
python         executor for functions in the worker's process; simulated: for tests and demos
resume         continuing from a checkpoint; track: what an attempt has made, as beats
faults         every fault's code, verdict and delay; breaker: who may try a server that refuses
executors      executors of a pool from models.toml; check: what a server can do
"""
