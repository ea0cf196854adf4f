"""`timeball demo`: real flights, a real broker, real Spark, and a count at the end.

    flights    the data: 336,776 departures of 2013, as columns
    clocks     one day in a minute; last year's dates in the coming year
    broker     `timeball up` as a child process
    spark      bulk write and audit
    day        schedule, cancel and consume one day as it falls due
    outcome    what happened, counted; the table at the end
    pictures   due load and lateness as PNG
    command    the command itself, in order

Everything goes through the public doors: the client, the Spark data source, the command line. The demo holds
no shortcut into the broker, so what it shows is what a user gets.
"""

from timeball.cli.demo.command import demo

__all__ = ["demo"]
