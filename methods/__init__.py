import common  # before a method imports torch: it sets how torch's threads wait
