"""The one HTTP client.

In: an address, headers, a body. Out: an `Answer` whose bytes are bounded in number and in time.
It knows proxies, own CAs, logins, redirects, pauses that servers ask for, and Ctrl-C. What an
answer means is for the packages that ask: fetch, registry and weights turn `Lost`, `BadAnswer`,
`BadAddress` and `Untrusted` into errors of their own family. Imports the shared modules only.
"""
