"""`hisparse top`: a live view of a cluster on a terminal, and the commands of whoever watches it.

    keys.py      bytes of a terminal -> names of keys                                    pure
    sample.py    what the coordinator said at one moment, and rates between two of them   pure
    screen.py    what is shown and selected; keys in, asks out                            pure
    draw.py      a screen as lines of text for a width and height                         pure
    terminal.py  the terminal itself: modes, size, drawing lines that changed
    run.py       tasks: poll and reconnect, read keys, carry out asks, signals

It looks through a client connection and acts through an admin connection made for each act, so that who may only look
can look. Losing the coordinator changes nothing but the head line: what was known last stays, and it is tried again.

Rejected: textual (a second event loop beside trio, and rows of widgets where a screenful of text does); rich's Live
(draws everything each time, which flickers over slow links, and leaves keys to us); curses (no styles by name, and
terminfo's view of a terminal is one more thing to be wrong over ssh).
"""
