"""What the servers' request handlers share."""


class QuietKeepAlive:
    """For a `BaseHTTPRequestHandler`: answers the requests of one connection, silently.

    `Expect: 100-continue` is answered by the base class; without an answer curl waits a second before each upload.
    """

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16

    def log_message(self, *_) -> None:
        pass

    def handle_expect_100(self) -> bool:
        super().handle_expect_100()
        self.wfile.flush()
        return True
