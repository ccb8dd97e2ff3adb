from outrider.cli.main import main
