from benchmarks.peers.audit import main

main()
