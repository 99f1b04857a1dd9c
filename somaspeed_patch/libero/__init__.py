"""The LIBERO simulator beside LeRobot: offline set-up, a scripted expert, and a recorder of its episodes."""
