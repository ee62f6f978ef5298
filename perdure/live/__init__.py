"""Watching tasks: live progress, waiting, event streams.

hub.py        one per process: reads rows and beats for all who watch        watch.py    what it knows of a task
progress.py   the last beats, shared and budgeted                           queue.py    why a task waits; places.py
story.py      a row as the moves that led to it                             cursor.py   a place in it: the event id
reader.py     one watcher of one task
feed.py       changes of many tasks, one query for all                      mark.py     a place in them: the event id
follower.py   one watcher of many tasks
sse.py        frames                                                        token.py    stream tokens
"""
