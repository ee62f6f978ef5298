"""Watching tasks: live progress, waiting, event streams.

hub.py        one per process: reads rows and beats for all who watch
watch.py      what it knows of a watched task
progress.py   the last beats, shared and budgeted
queue.py      why a task waits, and about how long; places.py keeps that for watched tasks
story.py      a row as the moves that led to it
cursor.py     a place in one task's story: the event id
reader.py     one watcher of one task
feed.py       the changes of many tasks, one query for all streams
mark.py       a place in those changes: the event id
follower.py   one watcher of many tasks
sse.py        frames of an event stream
token.py      stream tokens
"""
