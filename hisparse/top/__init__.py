"""`hisparse top`: a live view of a cluster on a terminal, with commands on the selected request or worker.

    keys.py      bytes of a terminal -> names of keys                                    pure
    sample.py    rows of the coordinator at one time, and rates between two samples       pure
    screen.py    state of the view and the selection; keys in, asks out                   pure
    draw.py      a screen as lines of text for a width and height                         pure
    terminal.py  the terminal itself: modes, size, drawing lines that changed
    run.py       tasks: poll and reconnect, read keys, carry out asks, signals

It reads through a client connection and opens an admin connection for each command, so a user without an admin key can
watch. When the coordinator is lost, the head line shows it, the last rows stay, and it reconnects.

Rejected: textual (a second event loop beside trio, and widgets where lines of text suffice); rich's Live (it draws the
whole screen each time, which flickers over slow links, and reads no keys); curses (no styles by name, and terminfo is
often wrong over ssh).
"""
