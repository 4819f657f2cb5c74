"""Durable jobs: a call of a tool that lives in a folder and in processes of its own.

A job outlives whoever started it. Its folder holds all there is to know, every file in it appears
whole, and a lock that only living processes can hold tells a running job from one that died:

    runs/jobs/<id>/call.json     what was asked: tool, arguments, key, limits; never changes
                   lock          held by the supervisor as long as it lives
                   state.json    queued, running, done, failed, cancelled, timed-out
                   log           all that the tool printed, its progress among it
                   result.json   document, text and exit code, or the error
                   cancel        somebody asked for an end

``operations.py`` lists what can be called, ``store.py`` creates, reads, waits for and cancels jobs,
``supervise.py`` and ``perform.py`` are the two processes of a job. There is no daemon and no queue
server: jobs that wait for a slot are processes that wait for a file lock.

    zm job list
"""
