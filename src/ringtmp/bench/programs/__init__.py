"""Commands that jobs run where one `ringtmp train` is not enough: each prints one line of JSON, a Result."""
