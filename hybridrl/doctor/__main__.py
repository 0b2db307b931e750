"""python -m hybridrl.doctor"""

from hybridrl.doctor.main import main

if __name__ == "__main__":
    main()
